# fsdp_lab on NVIDIA GPUs: JupyterLab on the notebooks. In a clone:
#   docker build -f binder/gpu.Dockerfile -t fsdp-lab .
#   docker run --rm --gpus all --shm-size 8g -p 127.0.0.1:8888:8888 fsdp-lab
# Open the URL with the token that it prints. Without --gpus the ranks run on CPUs. Ranks and NCCL exchange data in /dev/shm,
# of which a container has 64 MB without --shm-size.
# Its name is not `Dockerfile`, because Binder would build a file of that name instead of environment.yml.

FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04 AS base
# torch.compile needs a C++ compiler and Python's headers.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ git openssh-client python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
USER ubuntu
RUN mkdir /home/ubuntu/fsdp_lab
WORKDIR /home/ubuntu/fsdp_lab
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

FROM base AS lab
COPY --chown=ubuntu pyproject.toml README.md LICENSE ./
COPY --chown=ubuntu .ci .ci
COPY --chown=ubuntu fsdp_lab fsdp_lab
COPY --chown=ubuntu notebooks notebooks
RUN python3 -m venv .venv && .venv/bin/pip install -c .ci/constraints.txt -e .
EXPOSE 8888
# Published on 127.0.0.1 alone by the command above; the token is asked for in any case.
CMD [".venv/bin/fsdp-lab", "lab", "--ip", "0.0.0.0", "--port", "8888", "--no-browser"]
