"""Inside one replica, where prompts and weights meet: actor, answers, updates, workers."""
