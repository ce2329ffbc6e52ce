#!/usr/bin/env bash
# Counts the instructions of every kernel under callgrind and compares them with counts.txt; `--write` stores them there.
# Usage: counts.sh PROGRAM COMPILER [--write]
# More than stored by a share above the tolerance is a failure; fewer is told, so that the stored figure can follow.
# Figures belong to a compiler; another one, or another version of it, may take up to twice as many.
set -euo pipefail
program=$1 compiler=$2 stored=$(dirname "$0")/counts.txt
levels="scalar avx2" # valgrind knows no AVX-512
tolerance=0.05 slack=200 # share, and instructions: the C library copies memory in ways that depend on the CPU
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

version="$("$compiler" --version | head -n 1 | awk '{ print $1 }') $("$compiler" -dumpversion | cut -d. -f1)"
for level in $levels; do
    export QWENREF_CPU=$level
    if ! "$program" >/dev/null 2>"$scratch/refused"; then
        echo "level $level left out: $(head -n 1 "$scratch/refused")"
        continue
    fi
    valgrind --quiet --tool=callgrind --collect-atstart=no --callgrind-out-file="$scratch/$level.out" "$program"
    # one file per dump: which case it was of, and how many instructions
    for file in "$scratch/$level".out.*; do
        awk -v level="$level" '
            /^desc: Trigger: Client Request: / { sub(/^desc: Trigger: Client Request: /, ""); name = $0 }
            /^(summary|totals): / { count = $2 }
            END { if (name != "") printf "%s\t%s\t%d\n", level, name, count }' "$file"
    done
done >"$scratch/raw"
grep -v $'\t' "$scratch/raw" || true
grep $'\t' "$scratch/raw" | sort >"$scratch/counts"
[ -s "$scratch/counts" ] || { echo "nothing was counted" >&2; exit 1; }

if [ "${3-}" = --write ]; then
    { printf '# %s\n' "$version"; cat "$scratch/counts"; } >"$stored"
    echo "$(wc -l <"$scratch/counts") counts stored in $stored"
    exit
fi

read -r _ written <"$stored"
if [ "$written" != "$version" ]; then
    echo "counts stored for $written, this is $version: up to twice as many are let pass"
    tolerance=1
fi
awk -F '\t' -v tolerance="$tolerance" -v slack="$slack" '
    /^#/ { next }
    NR == FNR { stored[$1 "\t" $2] = $3; next }
    {
        key = $1 "\t" $2; seen++
        if (!(key in stored)) { print "no figure stored: " key; bad++; next }
        change = $3 / stored[key] - 1
        if ($3 > (1 + tolerance) * stored[key] + slack) { printf "more: %+.1f %%  %d -> %d  %s\n", 100 * change, stored[key], $3, key; bad++ }
        else if (change < -tolerance) printf "fewer: %+.1f %%  %d -> %d  %s\n", 100 * change, stored[key], $3, key
    }
    END {
        printf "%d kernels counted, %d too many\n", seen, bad
        if (bad) print "make -C csrc counts-write stores the new figures, where they are meant"
        exit bad > 0
    }' "$stored" "$scratch/counts"
