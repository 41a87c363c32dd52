"""From a plan to a verdict: discover, schedule, run, confirm, judge."""
