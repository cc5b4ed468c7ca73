# docker build -t gshard .                              for CPU
# docker build -t gshard --build-arg EXTRAS=cuda .      for NVIDIA GPUs; or tpu, all, "cuda,gcs"
# It has no script: examples/cluster/README.md builds the image of its manifests on top of it.
FROM python:3.13-slim
ARG EXTRAS=
COPY pyproject.toml README.md LICENSE /src/
COPY gshard /src/gshard
RUN pip install --no-cache-dir "/src${EXTRAS:+[$EXTRAS]}" && rm -r /src && gshard --version
ENTRYPOINT ["gshard"]
CMD ["--help"]
