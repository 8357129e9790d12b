"""Check that an engine and the trainer agree on log-probabilities, and self-test this machine."""

from grpo_fast.doctor.causes import Cause
from grpo_fast.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["Cause", "Diagnosis", "diagnose"]
