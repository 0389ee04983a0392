#!/usr/bin/env bash
# What tests need of Debian: Chromium for `pytest -m browser`, and for launches over ssh a server,
# which those tests start themselves: it is not started here. Run as root; installs what is missing.
set -euo pipefail

missing=()
command -v chromium >/dev/null || missing+=(chromium)
[ -x /usr/sbin/sshd ] || missing+=(openssh-server)
if [ "${#missing[@]}" -eq 0 ]; then exit; fi

# Debian asks this file whether a package that brings a service may start it.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi
trouble() {
  echo "apt-get cannot install ${missing[*]}; without them the tests of the browser and of ssh do not run." >&2
  exit 1
}
apt-get update -qq || trouble
DEBIAN_FRONTEND=noninteractive \
  apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null || trouble
