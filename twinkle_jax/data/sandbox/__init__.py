"""Where chat templates run: an environment that shows them little, and a budget."""
