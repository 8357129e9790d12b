"""Why an engine's logps are not the trainer's, and whether this machine computes right."""

from grpo_fast.doctor.causes import Cause
from grpo_fast.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["Cause", "Diagnosis", "diagnose"]
