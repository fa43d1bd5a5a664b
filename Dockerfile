# The service as an image. It needs a project at /srv/bough (bough.yaml, agents, tools) and a volume for its database:
#
#   docker build --tag bough .
#   docker run -p 127.0.0.1:50051:50051 -v ./examples/desk:/srv/bough:ro -v bough-data:/var/lib/bough \
#       bough serve --host 0.0.0.0 --allow-insecure
FROM python:3.13-slim-trixie AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY server server
COPY clients/python clients/python
RUN python -m venv /opt/bough \
    && /opt/bough/bin/python -m pip install ".[server,postgres]" \
    && mkdir -p /var/lib/bough

FROM python:3.13-slim-trixie

# No user has to be made for a number, and a cluster sees that it is not root.
COPY --from=build /opt/bough /opt/bough
COPY --from=build --chown=10001:10001 /var/lib/bough /var/lib/bough
ENV PATH=/opt/bough/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    BOUGH_DATABASE=/var/lib/bough/bough.db
USER 10001:10001
WORKDIR /srv/bough
VOLUME /var/lib/bough
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=10s --start-period=30s CMD ["bough", "health"]
ENTRYPOINT ["bough"]
# On loopback inside the container, as everywhere: calls are not encrypted, and an image cannot know who reaches its port.
CMD ["serve"]
