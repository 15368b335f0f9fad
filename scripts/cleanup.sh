# Sourced by test.sh: however the script ends, what it started is gone then, servers in sessions of their own too. Each
# process inherits a mark, by which it is found.

export MIS_TEST_RUN="$$-$RANDOM"

kill_started() {
    local status=$? process
    kill -KILL $(jobs -p) 2>/dev/null || true # just forked, and without the mark until it executes
    for process in $(grep -lsz "^MIS_TEST_RUN=$MIS_TEST_RUN\$" /proc/[0-9]*/environ | cut -d/ -f3); do
        kill -KILL "$process" 2>/dev/null || true # the search itself has ended by now
    done
    exit "$status"
}
trap kill_started EXIT
