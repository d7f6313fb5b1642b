# syntax=docker/dockerfile:1
# The router's image: built from source, runs as nobody in particular on a read-only root.
#   docker build -t kvatlas .
# Everything that goes in is pinned: the base by digest, packages by version and hash (`make lock` writes them anew).
ARG BASE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements requirements
RUN python -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r requirements/build.txt
RUN python -m venv /opt/kvatlas && /opt/kvatlas/bin/pip install --require-hashes -r requirements/image.txt
COPY pyproject.toml README.md LICENSE ./
COPY kvatlas kvatlas
COPY publisher publisher
COPY connectors connectors
COPY router router
RUN /opt/build/bin/hatchling build -t wheel -d /wheels \
    && /opt/kvatlas/bin/pip install --no-deps /wheels/*.whl \
    && /opt/kvatlas/bin/python -m compileall -q /opt/kvatlas/lib

FROM ${BASE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kvatlas" \
      org.opencontainers.image.description="Routes LLM requests to the vLLM engine that has to compute the least" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /opt/kvatlas /opt/kvatlas
ENV PATH=/opt/kvatlas/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HOME=/var/cache/kvatlas
RUN install -d -o 65532 -g 65532 /var/cache/kvatlas
USER 65532:65532
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=6 \
    CMD ["python", "-m", "kvatlas.router.health_check"]
ENTRYPOINT ["kvatlas"]
CMD ["serve", "--config", "/etc/kvatlas/config/kvatlas.toml"]
