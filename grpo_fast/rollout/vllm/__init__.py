"""The engines `vllm` and `vllm-server`: vLLM in the trainer's process, or on servers."""
