"""Options of the engines `vllm` and `vllm-server`, without the sampling options."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grpo_fast.errors import require

URL = re.compile(r"https?://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+):([1-9][0-9]{0,4})/*", re.I | re.A)


LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[?::1\]?)(:[0-9]+)?")


class VLLMOptions(BaseModel):
    """The section `rollout.vllm` of a configuration.

    Attributes:
        options: Arguments of the class vllm.LLM for engine: vllm, such as {gpu_memory_utilization:
            0.4}.
        urls: Servers for engine: vllm-server, each as http://host:port.
        transfer: How servers receive weights. auto is nccl if the policy is on a GPU, otherwise
            gloo.
        address: IPv4 address or name of the trainer's machine at which the servers can reach it.
        timeout: Seconds for one of three tries to sample a step, and for one transfer of weights.
        patience: Seconds to wait for a server that does not respond.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    options: dict[str, Any] = Field(default_factory=dict)
    urls: list[str] = Field(default_factory=list)
    transfer: Literal["auto", "nccl", "gloo"] = "auto"
    address: str = Field("127.0.0.1", min_length=1)
    timeout: float = Field(600.0, gt=0, le=1e6)
    patience: float = Field(300.0, ge=0, le=1e6)

    @model_validator(mode="before")
    @classmethod
    def _plain_urls(cls, settings: Any) -> Any:
        """Check the URLs first, because pydantic's error would quote a URL with its password."""
        if not isinstance(settings, dict) or "urls" not in settings:
            return settings
        urls = settings["urls"]
        is_list = isinstance(urls, list | tuple) and all(isinstance(url, str) for url in urls)
        found = [URL.fullmatch(url) for url in urls] if is_list else [None]
        if any(url is None or int(url[1]) >= 1 << 16 for url in found):
            expected = "expected http://host:port and nothing else, in a list"
            raise ValueError(f"urls: {expected} (not shown: it may hold a password)")
        return settings | {"urls": [url.rstrip("/").lower() for url in urls]}

    @model_validator(mode="after")
    def _reachable(self) -> VLLMOptions:
        """Check that no server is listed twice, and that all servers can reach `address`."""
        for url in self.urls:
            fits = is_local(url) or not is_local(f"://{self.address}")
            expected = f"an address of this machine that {url} can reach"
            require(fits, "address", expected, self.address)
        names = {url.replace("//localhost:", "//127.0.0.1:") for url in self.urls}
        require(len(names) == len(self.urls), "urls", "every server once", ", ".join(self.urls))
        return self


def is_local(url: str) -> bool:
    """Return whether a URL names this machine's loopback address."""
    return LOOPBACK.fullmatch(url.partition("://")[2]) is not None
