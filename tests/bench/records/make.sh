#!/bin/sh
# Makes the records that tests/bench/test_diff_records.py reads, in this folder; about 5 minutes on a quiet machine.
# Runs of one build and of the same build slowed on purpose take turns. One that others disturbed is made again: the
# diff would refuse it.
set -e
cd "$(dirname "$0")"

measure() { # name, how often the first layer is computed again
    SLOWED=$2 outrider bench iteration --model slowable:classifier --image-size 16 --batch-size 32 --devices cpu \
        --iterations 20 --warmup 5 --rounds 5 --json "$1.json" > /dev/null
}

is_disturbed() {
    python - "$1.json" << 'END'
import sys
from pathlib import Path
from outrider.bench.iteration.iteration_record import read_iterations
sys.exit(not read_iterations(Path(sys.argv[1])).was_disturbed)
END
}

measure_in_quiet() {
    measure "$1" "$2"
    while is_disturbed "$1"; do measure "$1" "$2"; done
}

for number in 1 2 3; do
    measure_in_quiet "same-$((2 * number - 1))" 0
    measure_in_quiet "slowed-$number" 4
    measure_in_quiet "same-$((2 * number))" 0
done
measure_in_quiet same-7 0
