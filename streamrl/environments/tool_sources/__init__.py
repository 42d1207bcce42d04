"""Sources of tools besides a user's class: Python in the sandbox, MCP servers."""
