"""MCP server over stdin and stdout in plain Python: starts at once, and misbehaves on demand."""

import json
import os
import subprocess
import sys
import time

TOOLS = {
    "count": {"type": "object"},
    "say": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "sleep": {"type": "object", "properties": {"seconds": {"type": "number"}}},
    "breed": {"type": "object"},
    "show_environment": {"type": "object"},
    "die": {"type": "object"},
    "refuse": {"type": "object"},
    "write": {"type": "object", "properties": {"shape": {"type": "string"}}},
}
calls = 0


def call(name, arguments):
    global calls
    calls += 1
    if name == "count":
        return f"{calls} {os.getpid()}"
    if name == "say":
        return arguments["text"]
    if name == "sleep":
        time.sleep(arguments["seconds"])
        return "slept"
    if name == "breed":
        # An orphan, which no parent leads to.
        code = "import os; os.fork() and os._exit(0); print(os.getpid(), flush=True)"
        command = [sys.executable, "-S", "-c", f"{code}; import time; time.sleep(600)"]
        orphan = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert orphan.stdout is not None
        return f"{orphan.stdout.readline().strip()} {os.getpid()}"
    if name == "show_environment":
        return json.dumps(dict(os.environ))
    if name == "die":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    shapes = {"long": "x" * 2_000_000, "nothing": "", "half": "a\ue001b"}
    return shapes.get(arguments["shape"], arguments["shape"])


def answer(request):
    method, parameters = request["method"], request.get("params", {})
    if method == "initialize" and "deny" not in sys.argv:
        version = parameters["protocolVersion"]
        info = {"name": "raw", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": schema} for name, schema in TOOLS.items()]}
    if method == "tools/call" and parameters["name"] != "refuse":
        text = call(parameters["name"], parameters.get("arguments", {}))
        return {"content": [{"type": "text", "text": text}], "isError": False}
    raise LookupError(method)


def main():
    if "fail" in sys.argv:
        sys.exit("no such index")
    print("a line that is no message", flush=True)
    if "deny" in sys.argv:
        print("ready", file=sys.stderr, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        response = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            response["result"] = answer(request)
        except LookupError as error:
            response["error"] = {"code": -32601, "message": f"no method {error}"}
        data = json.dumps(response).encode()
        sys.stdout.buffer.write(data.replace(b"\\ue001", b"\xff") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
