# The runtime: slots and gateway. Built from the repository's root:
#   docker build -f docker/runtime.Dockerfile -t strata-runtime:0.1.0 .
# For processors alone, without the CUDA libraries (several gigabytes less), name the index of torch's CPU wheels:
#   docker build -f docker/runtime.Dockerfile --build-arg EXTRA=runtime --build-arg TORCH_INDEX=... -t strata-runtime:0.1.0-cpu .
FROM python:3.12-slim AS build
ARG EXTRA=cuda
ARG TORCH_INDEX=
WORKDIR /src
# For the native kernels; without a compiler the install falls back to the slower reference.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml hatch_build.py README.md LICENSE CHANGELOG.md ./
COPY planner planner
COPY runtime runtime
COPY operator operator
RUN python -m venv /opt/strata \
 && /opt/strata/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.11" \
 && /opt/strata/bin/pip install --no-cache-dir ".[$EXTRA,structured]"

FROM python:3.12-slim
COPY --from=build /opt/strata /opt/strata
ENV PATH=/opt/strata/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
# The operator gives the command: python -m strata_runtime.pipeline.slot, or python -m strata_runtime.gateway.
CMD ["python", "-m", "strata_runtime.gateway", "--help"]
