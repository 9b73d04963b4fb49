"""What is and was, for people and their tools: status, page, metrics, timeline. Changes nothing."""
