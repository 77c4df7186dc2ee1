"""GET /: the page. One file, no other resource, and a policy that forbids the browser to fetch any."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from importlib import resources

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()


@lru_cache(maxsize=1)
def _page() -> tuple[str, str]:
    """The page, and the content security policy that lets its own script run and nothing else."""
    text = resources.files("bigmodel.server").joinpath("page.html").read_text(encoding="utf-8")
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


@router.get("/", include_in_schema=False)
@router.head("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """Devices, live numbers and a chat box."""
    text, policy = _page()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})
