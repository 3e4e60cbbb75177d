#!/bin/sh
# ccache.sh CCACHE COMPILER ARGUMENTS...: compiles through ccache, precompiled headers too. Where the precompiled header
# of an earlier build is still there, ccache takes it for the text of the one to be made, and gives that again.
ccache=$1
shift
case "$*" in
*c++-header*)
  # It holds checksums of the headers it is made of, comments included: of other ones they would be read a second time. So
  # comments count, also where what was found without them has been noted for the present headers.
  export CCACHE_COMMENTS=1 CCACHE_NODIRECT=1
  for argument; do case $argument in *.gch) rm -f "$argument" ;; esac done
  ;;
esac
# The two things that it is to overlook are what precompiled headers cannot tell it.
CCACHE_SLOPPINESS=pch_defines,time_macros exec "$ccache" "$@"
