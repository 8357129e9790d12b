"""Comparison of the log-probabilities of engine and trainer, and self-tests of the machine."""

from grpo_fast.doctor.causes import Cause
from grpo_fast.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["Cause", "Diagnosis", "diagnose"]
