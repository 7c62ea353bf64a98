"""The commands: run, top, report, compare, where, verify, plan, doctor."""
