"""Options of the engines `vllm` and `vllm-server`, without the sampling options."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grpo_fast.errors import require

URL = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+):([0-9]{1,5})/*", re.I | re.A)


class VLLMOptions(BaseModel):
    """The section `rollout.vllm` of a configuration."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class vllm.LLM for engine: vllm, such as {gpu_memory_utilization: 0.4}."""
    urls: list[str] = Field(default_factory=list)
    """Servers for engine: vllm-server, each as http://host:port."""
    transfer: Literal["auto", "nccl", "gloo"] = "auto"
    """How servers receive weights. auto is nccl if the policy is on a GPU, otherwise gloo."""
    address: str = Field("127.0.0.1", min_length=1)
    """Address of the trainer's machine at which the servers can reach it."""
    timeout: float = Field(600.0, gt=0, le=1e6)
    """Seconds for one of three tries to sample a step, and for one transfer of weights."""
    patience: float = Field(300.0, ge=0, le=1e6)
    """Seconds to wait for a server that does not respond."""
    tolerance: float | None = Field(None, ge=0)
    """Mean gap to the policy after a transfer, in nats a token. null allows rounding of dtypes."""

    @model_validator(mode="before")
    @classmethod
    def _plain_urls(cls, settings: Any) -> Any:
        """Check the URLs first, because pydantic's error would quote a URL with its password."""
        if not isinstance(settings, dict) or "urls" not in settings:
            return settings
        urls = settings["urls"]
        if not isinstance(urls, list | tuple):
            urls = [None]
        return settings | {"urls": [plain_url("urls", url, ", in a list") for url in urls]}

    @model_validator(mode="after")
    def _reachable(self) -> VLLMOptions:
        """Check that no server is listed twice, and that all servers can reach `address`."""
        for url in self.urls:
            host = host_of(url)
            fits = is_loopback(host) or not is_loopback(self.address)
            expected = f"an address of this machine that {host} can reach"
            require(fits, "address", expected, self.address)
        names = {url.replace("//localhost:", "//127.0.0.1:") for url in self.urls}
        fits = len(names) == len(self.urls)
        require(fits, "urls", "every server once", ", ".join(self.urls))
        return self


def plain_url(name: str, url: Any, where: str = "") -> str:
    """Return a URL as http://host:port in lower case.

    Args:
        name: the setting, for the message.
        url: the value to check.
        where: text for the message that says where the value is, such as ", in a list".

    Raises:
        ValueError: the URL does not have this form. The message does not quote the URL.
    """
    parts = URL.fullmatch(url) if isinstance(url, str) else None
    if parts is None or not 0 < int(parts[3]) < 1 << 16:
        expected = f"expected http://host:port and nothing else{where}"
        raise ValueError(f"{name}: {expected} (not shown: it may hold a password)")
    return f"{parts[1]}://{parts[2]}:{int(parts[3])}".lower()


def host_of(url: str) -> str:
    return url.partition("://")[2].rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's loopback address, without a DNS query."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False
