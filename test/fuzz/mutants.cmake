# Mistakes that the fuzzer must find: mutant(NAME FILE FROM TO). Each could result from a plausible change.

mutant(answer_without_looking csrc/device/protocol.h
  [==[  words.fence();
  return !gave_up(words);]==]
  [==[  return true;]==])

mutant(answer_without_a_fence csrc/device/protocol.h
  [==[  words.fence();
  return !gave_up(words);]==]
  [==[  return !gave_up(words);]==])

mutant(gives_up_without_a_second_look csrc/device/protocol.h
  [==[  return reached(words.load(kAnswered), sequence) ? Take::kTaken : Take::kGaveUp;]==]
  [==[  return Take::kGaveUp;]==])

mutant(gives_up_without_a_fence csrc/device/protocol.h
  [==[  words.fence();
  return reached(words.load(kAnswered), sequence) ?]==]
  [==[  return reached(words.load(kAnswered), sequence) ?]==])

mutant(a_word_stored_relaxed csrc/device/protocol.h
  [==[store(value, std::memory_order_release)]==]
  [==[store(value, std::memory_order_relaxed)]==])

mutant(a_word_loaded_relaxed csrc/device/protocol.h
  [==[load(std::memory_order_acquire)]==]
  [==[load(std::memory_order_relaxed)]==])

mutant(failed_after_answered csrc/device/protocol.h
  [==[  words.store(kFailed, mark_of(sequence));
  return answer(words, sequence);]==]
  [==[  const bool heard = answer(words, sequence);
  words.store(kFailed, mark_of(sequence));
  return heard;]==])

mutant(late_again csrc/device/protocol.h
  [==[  return words.load(kLate) != 0;]==]
  [==[  return false;]==])

mutant(reset_leaves_a_word csrc/device/protocol.h
  [==[for (int word = 0; word <]==]
  [==[for (int word = kAnswered; word <]==])

mutant(one_slot csrc/device/layout.h
  [==[sequence % kMailboxSlots * mailbox_slot_bytes(s)]==]
  [==[0 * mailbox_slot_bytes(s) * (sequence & 1)]==])

mutant(parts_over_o csrc/device/layout.h
  [==[at.o = at.parts + mailbox_round(heads * kMailboxParts * 4)]==]
  [==[at.o = at.parts]==])

mutant(no_round_in_a_claim csrc/engine/task_queue.h
  [==[seen >> 8 != static_cast<uint64_t>(claim) >> kBits || ]==]
  [==[]==])

mutant(no_round_in_a_state csrc/engine/task_queue.h
  [==[round_ = round_ == kRoundMask ? 1 : round_ + 1;]==]
  [==[round_ = 1;]==])

mutant(settled_without_the_lock csrc/engine/task_queue.h
  [==[bool settle(Queue& queue, Mutex& mutex, int64_t claim, Write write) {
  const std::lock_guard lock(mutex);]==]
  [==[bool settle(Queue& queue, Mutex&, int64_t claim, Write write) {]==])

mutant(revoked_without_the_lock csrc/engine/task_queue.h
  [==[void revoke_rest(Queue& queue, Mutex& mutex, Lost lost) {
  const std::lock_guard lock(mutex);]==]
  [==[void revoke_rest(Queue& queue, Mutex&, Lost lost) {]==])

mutant(revoke_leaves_claims csrc/engine/task_queue.h
  [==[while ((seen & 15) == kReady || (seen & 15) == kClaimed) {]==]
  [==[while ((seen & 15) == kReady) {]==])

mutant(pop_without_taking csrc/engine/task_queue.h
  [==[head = word.fetch_add(1, std::memory_order_acq_rel);]==]
  [==[word.store(head + 1, std::memory_order_release);]==])

mutant(publishes_though_it_gave_up test/fuzz/scenario.h
  [==[      if (!gave_up(words)) {
        for]==]
  [==[      {
        for]==])

mutant(answers_before_it_writes test/fuzz/scenario.h
  [==[      cell(at.lse).write(s);
      heard = answer(words, s);]==]
  [==[      heard = answer(words, s);
      cell(at.lse).write(s);]==])

mutant(publishes_before_it_writes test/fuzz/scenario.h
  [==[        for (int64_t offset : {at.q, at.k, at.v, at.layer, at.published_at}) cell(offset).write(s);
        cell(at.taken_at).write(0);
        announce(words, kPublished, s);]==]
  [==[        announce(words, kPublished, s);
        for (int64_t offset : {at.q, at.k, at.v, at.layer, at.published_at}) cell(offset).write(s);
        cell(at.taken_at).write(0);]==])

mutant(every_block_notes_the_time test/fuzz/scenario.h
  [==[    while (!is_look_of(found = looked_.load(std::memory_order_acquire), s)) Sync::pause();
]==]
  [==[    while (!is_look_of(found = looked_.load(std::memory_order_acquire), s)) Sync::pause();
    if (found_answer(found)) cell(slot(s).taken_at).write(s);
]==])

mutant(notes_the_time_though_it_gave_up test/fuzz/scenario.h
  [==[const bool stamps = !gave_up(words);]==]
  [==[const bool stamps = true;]==])

mutant(reads_the_times_after_its_answer test/fuzz/scenario.h
  [==[    // A policy may look at its layer until the next one is answered.
]==]
  [==[    if (s > 1) Sync::check(cell(slot(s - 1).taken_at).read() == s - 1, "the times are another's");
]==])

mutant(does_not_wait_for_its_worker test/fuzz/scenario.h
  [==[    while (left_.load(std::memory_order_acquire) != s) Sync::pause();
]==]
  [==[]==])

mutant(a_block_does_not_wait_for_the_first csrc/device/protocol.h
  [==[return word >> 1 == (sequence & 0x7fffffffu);]==]
  [==[return word != sequence << 1;]==])
