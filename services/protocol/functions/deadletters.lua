-- Dead letters: put back what failed.
-- reads and writes: run, deadletter, ledger, outstanding, group:<group>, trained:<epoch>, drops, drops:order
-- owns:             requeued list  ids of tickets taken from the dead letters, waiting to be issued again

-- Nil when the ticket of a dead letter may be issued again, else the reason why not.
local function objection(prefix, letter)
  local ticket = letter.ticket or ''
  local epoch, index = string.match(ticket, '^(%d+)-(%d+)$')
  if letter.outcome ~= 'failed' then return 'its ticket was not under way when it came, or trained before: it never counted as failed' end
  if not epoch or #epoch > 9 or #index > 9 then return 'its ticket id is not of the form <epoch>-<row>' end
  if redis.call('ZSCORE', prefix .. ':outstanding', ticket) then return 'its ticket is under way again' end
  if redis.call('LPOS', prefix .. ':requeued', ticket) then return 'its ticket waits to be issued again already' end
  if redis.call('EXISTS', prefix .. ':group:' .. ticket) == 1 then return 'its group is in the replay table or in a step' end
  if redis.call('GETBIT', prefix .. ':trained:' .. epoch, index) == 1 then return 'its prompt was trained' end
end

local function read_letter(prefix, id)
  local found = redis.pcall('XRANGE', prefix .. ':deadletter', id, id) -- the id may be any text
  if found.err or #found == 0 or found[1][1] ~= id then return end
  local fields, letter = found[1][2], {}
  for i = 1, #fields, 2 do letter[fields[i]] = fields[i + 1] end
  return letter
end

-- args: entries of the dead-letter stream. Each that was counted as failed and whose ticket is nowhere else leaves the stream and
-- waits to be issued again. Returns {entry, ticket, refusal, …}; an empty refusal says that it was put back. A repeated call finds
-- the entry gone, and changes nothing.
register('requeue', function(prefix, args)
  local refusal = busy(prefix)
  if refusal then return refusal end
  local ended = redis.call('HMGET', prefix .. ':run', 'finished', 'stopping')
  local over = (ended[1] or ended[2]) and 'the run is over: ' .. (ended[1] or ended[2])
  local reply, put_back = {}, 0
  for _, id in ipairs(args) do
    local letter = read_letter(prefix, id)
    local why = over or not letter and 'there is no such dead letter: it was put back before, or trimmed'
      or objection(prefix, letter)
    if not why then
      redis.call('XDEL', prefix .. ':deadletter', id)
      redis.call('HDEL', prefix .. ':drops', letter.ticket)
      redis.call('ZREM', prefix .. ':drops:order', letter.ticket)
      redis.call('RPUSH', prefix .. ':requeued', letter.ticket)
      put_back = put_back + 1
    end
    reply[#reply + 1] = id
    reply[#reply + 1] = letter and letter.ticket or ''
    reply[#reply + 1] = why or ''
  end
  if put_back > 0 then
    count(prefix, 'failed', -put_back)
    ring(prefix, 'slots')
  end
  return reply
end)
