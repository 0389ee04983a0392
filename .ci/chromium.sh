#!/usr/bin/env bash
# Chromium for `pytest -m browser`, as Debian packages it. Run as root; does nothing where it is.
set -euo pipefail

if command -v chromium >/dev/null; then exit; fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium >/dev/null
