"""MCP server written with the package `mcp`: over stdin and stdout, or HTTP on a port."""

import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("example", log_level="ERROR")


@server.tool()
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    if b == 0:
        raise ToolError("b must not be 0")
    return a / b


@server.tool()
def draw() -> Image:
    """Draw a picture."""
    return Image(data=b"\x89PNG", format="png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
