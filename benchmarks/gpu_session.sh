#!/usr/bin/env bash
# A session on a machine with an NVIDIA GPU. gpu/session.sh describes its two visits.
exec "$(dirname "${BASH_SOURCE[0]}")/gpu/session.sh" "$@"
