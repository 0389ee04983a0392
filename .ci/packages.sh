#!/usr/bin/env bash
# What tests need of Debian: Chromium for `pytest -m browser`, and for launches over ssh a server,
# which those tests start themselves: it is not started here. Run as root; installs what is missing.
set -euo pipefail

missing=()
command -v chromium >/dev/null || missing+=(chromium)
[ -x /usr/sbin/sshd ] || missing+=(openssh-server)
if [ "${#missing[@]}" -eq 0 ]; then exit; fi

trouble() {
  echo "$1 ${missing[*]}, without which the tests of the browser and of ssh do not run; install them." >&2
  exit 1
}
[ "$(id -u)" -eq 0 ] || trouble "Only root can install"

# Debian asks this file whether a package that brings a service may start it.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi
apt-get update -qq || trouble "apt-get cannot install"
DEBIAN_FRONTEND=noninteractive \
  apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null ||
  trouble "apt-get cannot install"
