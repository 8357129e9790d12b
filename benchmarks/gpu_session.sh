#!/usr/bin/env bash
# One session on a machine with an NVIDIA GPU; what it does and takes stands in gpu/session.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/gpu/session.sh" "$@"
