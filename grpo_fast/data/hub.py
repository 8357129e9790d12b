"""Ask once whether the hub can be reached: its clients retry for half a minute, and say so."""

from __future__ import annotations

import functools
import os
import socket
import sys
from urllib.parse import urlsplit
from urllib.request import getproxies

SECONDS = 3.0
LOCAL = "the hub cannot be reached: say data=FILE or a folder, or model.path=FOLDER"


@functools.cache
def is_offline() -> bool:
    """Whether nothing answers at the hub: its clients then look into their cache alone from now on.
    A proxy is left to the clients.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    if getproxies():
        return False
    place = urlsplit(constants.ENDPOINT)
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((place.hostname, port), timeout=SECONDS).close()
    except OSError:
        # For libraries that have read it already, too.
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if settings := sys.modules.get("datasets.config"):  # else not installed, or reads it later
            vars(settings).update(HF_HUB_OFFLINE=True, HF_DATASETS_OFFLINE=True)
        return True
    return False
