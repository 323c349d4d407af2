#!/bin/sh
# Runs a compiler and keeps its output as DIRECTORY/<object>.txt; report_kernels.py reads that file.
# Usage: compile_with_log.sh DIRECTORY COMPILER [ARGUMENTS...]; CMake calls it as a launcher. A
# Python script would not do: its command would name the interpreter, and a build with another
# interpreter would compile everything again.
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
