"""What several tutorials need: the task, the engines, and quiet libraries."""
