"""Programs that try things, as text, one module per threat: they run inside a sandbox, or as a control where nothing defends.

Standard library only. Each prints one JSON object: what was tried -> `ok`, or why not (an errno's name). It tells what happened, not
whether that was right. The security tests and `corral certify` judge by the same programs.
"""
