"""An OpenAI-compatible server whose documents stay compressed."""
