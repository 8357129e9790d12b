"""Checks that an engine's log-probabilities are the trainer's, and self-tests of this machine."""

from grpo_fast.doctor.causes import Cause
from grpo_fast.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["Cause", "Diagnosis", "diagnose"]
