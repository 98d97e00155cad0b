# The operator: planner, inventory, rendering and the kopf shell; no torch. Built from the repository's root:
#   docker build -f docker/operator.Dockerfile -t strata-operator:0.1.0 .
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE CHANGELOG.md ./
COPY planner planner
COPY runtime runtime
COPY operator operator
RUN python -m venv /opt/strata && /opt/strata/bin/pip install --no-cache-dir ".[operator]"

FROM python:3.12-slim
COPY --from=build /opt/strata /opt/strata
ENV PATH=/opt/strata/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["strata"]
CMD ["operator"]
