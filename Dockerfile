# A server for exported models: docker run -p 8000:8000 -v "$PWD/models:/models:ro" IMAGE
# Build the wheel first: python -m build --wheel
FROM python:3.12-slim
COPY constraints.txt dist/*.whl /build/
# Scoring needs neither torch nor the packages for training, so the wheel goes in without its requirements.
RUN pip install --no-cache-dir -c /build/constraints.txt numpy onnxruntime orjson pyarrow rich safetensors starlette typer uvicorn \
    && pip install --no-cache-dir --no-deps /build/*.whl \
    && rm -r /build && useradd --create-home rarebit
USER rarebit
EXPOSE 8000
HEALTHCHECK CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/ready')"
ENTRYPOINT ["rarebit", "serve"]
CMD ["/models", "--host", "0.0.0.0"]
