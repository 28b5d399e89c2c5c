"""What several commands share: jobs and their memory, outputs, progress, the machine, a unit's statistics, texts."""
