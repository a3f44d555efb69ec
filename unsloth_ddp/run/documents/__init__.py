"""Write and read what describes a run: record, report, model card."""
