#!/bin/sh
# ccache.sh CCACHE COMPILER ARGUMENTS...: compiles through ccache, precompiled headers too. Where the precompiled header
# of an earlier build is still there, ccache takes it for the text of the one to be made, and gives that again.
ccache=$1
shift
case "$*" in
*c++-header*) for argument; do case $argument in *.gch) rm -f "$argument" ;; esac done ;;
esac
# The two things that it is to overlook are what precompiled headers cannot tell it.
CCACHE_SLOPPINESS=pch_defines,time_macros exec "$ccache" "$@"
