"""The engines `vllm`, which runs in the trainer's process, and `vllm-server`, on vLLM servers."""
