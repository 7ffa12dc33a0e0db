"""The MCP server: nine tools over the SDK, one sandbox per MCP session. Loaded by `corral mcp` alone."""
