"""The math of the correction: ratio, bound, rule, totals, pipeline. No host, no arguments, no metric."""
