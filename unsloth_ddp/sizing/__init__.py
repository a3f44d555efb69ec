"""Count what a run needs, and choose how a step is computed by it: for runs, plan and preflight alike."""
