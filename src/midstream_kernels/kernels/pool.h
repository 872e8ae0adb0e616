// Helper threads for one parallel loop at a time.
//
// The caller works, too, and never waits for a helper that has not begun. On a machine whose cores are busy with other
// processes, a loop then takes as long as the caller alone would. A barrier of all threads would wait for the operating
// system's scheduler. Helpers spin for the few microseconds between two kernels of a step and sleep between steps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Multiply-adds (about 80 us) below which waking a thread costs more than it gains.
constexpr double PARALLEL_MIN = 1 << 23;
// About 50 microseconds.
constexpr int SPINS = 2000;

static inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Pool {
 public:
  typedef void (*Body)(const void *, int64_t);

  static Pool &shared() {
    // Never destroyed: its threads live as long as the process.
    static Pool *pool = new Pool;
    return *pool;
  }

  // Runs body(context, i) for i in 0..count-1, in chunks of `chunk`. While another loop runs, the caller does it alone.
  void run(int threads, int64_t count, int64_t chunk, Body body, const void *context) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock() || count > LIMIT) {
      for (int64_t i = 0; i < count; ++i) body(context, i);
      return;
    }
    while (helpers_ < threads - 1 && !refused_) try {
        std::thread([this] { help(); }).detach();
        ++helpers_;
      } catch (const std::system_error &) {
        // A limit on threads or memory was reached: go on with the existing helpers.
        refused_ = true;
      }
    body_ = body;
    context_ = context;
    chunk_ = chunk;
    done_.store(0, std::memory_order_relaxed);
    epoch_ = (epoch_ + 1) & 0xFFFF;
    state_.store(epoch_ << 48 | (uint64_t)count << 24, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) {
      std::lock_guard<std::mutex> guard(sleep_);
      wake_.notify_all();
    }
    while (work()) {
    }
    for (int waited = 0; done_.load(std::memory_order_acquire) < count; ++waited) {
      if (waited < SPINS)
        relax();
      else
        std::this_thread::yield();
    }
  }

 private:
  static constexpr int64_t LIMIT = (1 << 24) - 1;

  // State: 16 bits of epoch, 24 of count, 24 of the next index. A thread that moves the next index owns the indices it passed.
  // Their loop cannot end before they are done, so the thread may read body_ and context_.
  static bool open(uint64_t state) { return (state & LIMIT) < (state >> 24 & LIMIT); }

  bool work() {
    uint64_t state = state_.load(std::memory_order_acquire);
    while (open(state)) {
      const int64_t count = state >> 24 & LIMIT, first = state & LIMIT;
      const int64_t last = first + chunk_ < count ? first + chunk_ : count;
      if (!state_.compare_exchange_weak(state, (state & ~(uint64_t)LIMIT) | last, std::memory_order_acq_rel)) continue;
      for (int64_t i = first; i < last; ++i) body_(context_, i);
      done_.fetch_add(last - first, std::memory_order_release);
      return true;
    }
    return false;
  }

  void help() {
    for (int idle = 0;;) {
      if (work()) {
        idle = 0;
      } else if (++idle < SPINS) {
        relax();
      } else {
        std::unique_lock<std::mutex> guard(sleep_);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(guard, [this] { return open(state_.load(std::memory_order_seq_cst)); });
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
        idle = 0;
      }
    }
  }

  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> state_{0};
  std::atomic<int64_t> done_{0}, chunk_{1};
  std::atomic<int> asleep_{0};
  Body body_ = nullptr;
  const void *context_ = nullptr;
  uint64_t epoch_ = 0;
  int helpers_ = 0;
  bool refused_ = false;
};

// Runs f(i) for i in 0..count-1 on up to `threads` threads. work: multiply-adds in all.
template <class F>
static void parallel(int threads, int64_t count, double work, const F &f) {
  if (threads <= 1 || count <= 1 || work < PARALLEL_MIN) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  const int64_t chunk = count / (threads * 8) + 1;
  Pool::shared().run(threads, count, chunk, [](const void *context, int64_t i) { (*(const F *)context)(i); }, &f);
}
