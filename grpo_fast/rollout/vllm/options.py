"""What the engines `vllm` and `vllm-server` are told beside the sampling."""

from __future__ import annotations

import ipaddress
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator


class VLLMOptions(BaseModel):
    """The section `rollout.vllm`."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    # vllm: arguments of its class LLM, as {gpu_memory_utilization: 0.4}
    options: dict[str, Any] = Field(default_factory=dict)
    # vllm-server: where the servers are, http://host:port
    urls: list[str] = Field(default_factory=list)
    # how weights reach them; auto: nccl from a GPU, else gloo
    transfer: Literal["auto", "nccl", "gloo"] = "auto"
    address: str = "127.0.0.1"  # of this machine, as the servers reach it
    timeout: float = Field(600.0, gt=0, le=1e6)  # seconds for the answers of a batch, or a transfer
    patience: float = Field(300.0, ge=0, le=1e6)  # seconds a server that is gone is waited for

    @model_validator(mode="after")
    def _reachable(self) -> VLLMOptions:
        for url in self.urls:
            host = host_of(url)
            if not is_loopback(host) and is_loopback(self.address):
                expected = f"expected an address of this machine that {host} can reach"
                raise ValueError(f"address: {expected}, came {self.address}")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls: expected every server once, came {', '.join(self.urls)}")
        return self


def host_of(url: str) -> str:
    """The host of a server's URL. Raises ValueError for anything that is not http(s)://host:port"""
    try:
        parts = urlsplit(url)
        needed = (parts.scheme in ("http", "https"), parts.hostname, parts.port)
        others = (parts.path.rstrip("/"), parts.query, parts.username)
        fits = all(needed) and not any(others)
    except ValueError:  # a port that is no number
        fits = False
    if not fits:
        raise ValueError(f"urls: expected http://host:port, came {url!r}")
    return str(parts.hostname)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
