# For NVIDIA GPUs; the host needs a driver and the NVIDIA container toolkit:
# docker build -f docker/cuda.Dockerfile -t jaxserve:cuda .
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY jaxserve jaxserve
COPY pallas_kernels pallas_kernels
COPY sharding_rules sharding_rules
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[cuda,cluster]"
RUN useradd --uid 1000 --create-home jaxserve && install --directory --owner 1000 --mode 0700 /cache
USER 1000
ENV JAXSERVE_CACHE=/cache NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["jaxserve"]
CMD ["--help"]
