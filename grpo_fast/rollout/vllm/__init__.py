"""The engines `vllm` (in the trainer's process) and `vllm-server` (on one or several servers)."""
