"""Name the files in the folder of a run."""

SETTINGS_FILE, SUMMARY_FILE, LOCK_FILE = "settings.yaml", "summary.json", "run.lock"
# What the report needs and no other file holds (see record.py).
RECORD_FILE = "record.json"
LOGS = "logs"
STATE_FILE, REPORT_FILE, CARD_FILE = "trainer_state.json", "report.html", "README.md"
