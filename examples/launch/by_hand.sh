#!/usr/bin/env bash
# Two hosts by hand: run this on each, with 0 on the first and 1 on the second.
#
#   HEAD=10.0.0.1 examples/launch/by_hand.sh 0
set -euo pipefail
NODES=2 NODE=$1 HEAD=${HEAD:?the address of host 0?} exec "$(dirname "$0")/../multihost.sh"
