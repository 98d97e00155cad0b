// Loops over torch's own threads: the OpenMP runtime that torch has loaded is found by name, never a second one, and only when a loop wants
// more than one thread (a process that will fork must not have started any). Without such a runtime loops run on the caller's thread.
#pragma once
#include <dlfcn.h>

#include <cstdint>

namespace strata {

struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread)() = nullptr;
  int (*threads)() = nullptr;
  int (*in_parallel)() = nullptr;

  static const OpenMp& loaded() {
    static const OpenMp found = [] {
      OpenMp each;
      each.parallel = reinterpret_cast<decltype(each.parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
      each.thread = reinterpret_cast<decltype(each.thread)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
      each.threads = reinterpret_cast<decltype(each.threads)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
      each.in_parallel = reinterpret_cast<decltype(each.in_parallel)>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
      if (!each.thread || !each.threads || !each.in_parallel) each.parallel = nullptr;
      return each;
    }();
    return found;
  }
};

// body(begin, end) over [0, count) cut into at most `threads` equal runs whose borders are multiples of `grain`.
template <class Body>
void parallel_for(int threads, int64_t count, int64_t grain, const Body& body) {
  const int64_t grains = (count + grain - 1) / grain;
  if (threads > grains) threads = static_cast<int>(grains);
  const OpenMp* omp = threads > 1 ? &OpenMp::loaded() : nullptr;
  if (!omp || !omp->parallel || omp->in_parallel()) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  struct Job {
    const Body& body;
    const OpenMp& omp;
    int64_t count, grain, grains;
  } job{body, *omp, count, grain, grains};
  omp->parallel(
      [](void* data) {
        const Job& job = *static_cast<Job*>(data);
        const int64_t of = job.omp.threads(), place = job.omp.thread();
        const int64_t begin = job.grains * place / of * job.grain;
        int64_t end = job.grains * (place + 1) / of * job.grain;
        if (end > job.count) end = job.count;
        if (begin < end) job.body(begin, end);
      },
      &job, static_cast<unsigned>(threads), 0);
}

}  // namespace strata
