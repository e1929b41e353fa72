# An image with the command `monolith`. Built for the kind of machine it is built on, ARM or x86:
#
#     docker build -t monolith .
#     docker run --rm -v "$PWD:/work" monolith train --config run.toml
#
# EXTRAS are those of pyproject.toml that the run needs; TORCH_INDEX may name another build of torch, such as one
# for CUDA.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++ cmake ninja-build && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml constraints.txt CMakeLists.txt README.md LICENSE ./
COPY native native
COPY src src
RUN PIP_BUILD_CONSTRAINT=/source/constraints.txt python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG EXTRAS=arrow,grpc,kafka,s3,tensorboard
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=wheel /wheels /wheels
COPY constraints.txt /wheels/
RUN python -m pip install --no-cache-dir -c /wheels/constraints.txt --extra-index-url "$TORCH_INDEX" \
      "$(ls /wheels/*.whl)[$EXTRAS]" && rm -rf /wheels
RUN useradd --create-home monolith
USER monolith
WORKDIR /work
ENTRYPOINT ["monolith"]
CMD ["--help"]
