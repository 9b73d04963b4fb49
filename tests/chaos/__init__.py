"""The kill matrix: whatever process is killed or stopped, whenever in a push, nothing is lost."""
