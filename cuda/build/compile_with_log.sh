#!/bin/sh
# Runs a compiler and keeps what it prints as DIRECTORY/<object>.txt, for report_kernels.py to read.
# Usage: compile_with_log.sh DIRECTORY COMPILER [ARGUMENTS...]; CMake calls it as a launcher. It is
# no Python script, since its command would name the interpreter, and a build with another one would
# compile everything again.
directory=$1
shift
previous=
object=
for argument in "$@"; do
  [ "$previous" = -o ] && object=${argument##*/}
  previous=$argument
done
mkdir -p "$directory" || exit
if [ -z "$object" ]; then
  exec "$@"
fi
"$@" >"$directory/$object.txt" 2>&1
status=$?
cat "$directory/$object.txt" >&2
exit $status
