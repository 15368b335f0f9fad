# Sourced by test.sh: when the script ends, in whatever way, kills every process that it started, also servers
# in sessions of their own. Each process inherits the mark MIS_TEST_RUN, by which it is found.

export MIS_TEST_RUN="$$-$RANDOM"

kill_started() {
    local status=$? process
    kill -KILL $(jobs -p) 2>/dev/null || true # a process just forked has no mark until it executes a program
    for process in $(grep -lsz "^MIS_TEST_RUN=$MIS_TEST_RUN\$" /proc/[0-9]*/environ | cut -d/ -f3); do
        kill -KILL "$process" 2>/dev/null || true # the search itself has ended by now
    done
    exit "$status"
}
trap kill_started EXIT
